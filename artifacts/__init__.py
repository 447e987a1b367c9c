"""Content keys, the artifact store and the shard formats; imports only configs."""

from fsspec import register_implementation

for scheme in ("s3", "s3a"):
    wanted = "Install s3fs to access S3"
    register_implementation(scheme, "artifacts.s3_client.S3", clobber=True, errtxt=wanted)
