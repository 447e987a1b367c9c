"""A remote store that refuses a request is no damage, whatever error its client raises."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponseError, InvalidURL, RequestInfo
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    ParamValidationError,
    UnauthorizedSSOTokenError,
)
from fsspec.config import conf as fsspec_config
from fsspec.core import url_to_fs
from gcs_objects import Refused
from gcs_server import GcsServer
from gcsfs.retry import HttpError
from google.auth.exceptions import DefaultCredentialsError
from google.protobuf.message import DecodeError
from httpx2 import Request, Response
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    StrictDataclassFieldValidationError,
)
from multidict import CIMultiDict, CIMultiDictProxy
from store_servers import RequestsTo, UrlOf
from yarl import URL

from artifacts.errors import StoreRefused, is_of_client, is_outage
from artifacts.filesystems import delete_tree
from artifacts.store import KeyParts, Store
from configs.errors import Away, Failed
from runtimes.train.checkpoints import Checkpoints
from tasks.build_or_reuse import storing
from tasks.publish.registry import Registry

PARTS = KeyParts("train", 1, {}, {})


def refuse(*_: Any) -> None:
    raise Refused(503, "the request is invalid at this time")


@pytest.mark.slow
def test_an_answer_that_gcsfs_raises_as_valueerror_is_no_damage(
    gcs: GcsServer, url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(url_of("gs"))
    draft = store.draft(PARTS)
    draft.write("a", b"alpha")
    artifact = draft.commit({}, {})
    registry = Registry(f"{store.url}/registry", "digits")
    registry.promote(registry.publish(artifact).name)
    checkpoints = Checkpoints(artifact.uri, keep=2)
    checkpoints.save(1, {}, ['{"step": 1}'], {})
    with monkeypatch.context() as patch:
        patch.setattr(gcs.objects, "get", refuse)
        for ask in (
            lambda: store.find(PARTS.stage, PARTS.key),
            lambda: store.fault(artifact),
            lambda: list(store.unreadable()),
            registry.versions,
        ):
            with pytest.raises(StoreRefused, match="invalid at this time"):
                ask()
        with pytest.raises(Away, match="invalid at this time"):
            checkpoints.latest()
        with pytest.raises(Away), storing(store):
            artifact.read("a")
    assert checkpoints.latest() is not None
    assert store.find(PARTS.stage, PARTS.key) is not None


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("SlowDown", Away),
        ("ServiceUnavailable", Away),
        ("InternalError", Away),
        ("AccessDenied", Failed),
        ("ExpiredToken", Failed),
        ("NoSuchKey", FileNotFoundError),
    ],
)
def test_an_outage_of_s3_is_waited_for(code: str, kind: type[Exception]) -> None:
    from s3fs.errors import translate_boto_error

    refused = ClientError({"Error": {"Code": code, "Message": "no"}}, "GetObject")
    error = translate_boto_error(refused)
    with pytest.raises(Exception) as found, storing(Store("memory://store-of-outages")):
        raise error from refused
    assert type(found.value) is kind


@pytest.mark.parametrize(
    ("status", "code", "passes"),
    [
        (400, "InvalidArgument", False),
        (400, "BadDigest", True),
        (400, "IncompleteBody", True),
        (400, "PriorRequestNotComplete", True),
        (400, "RequestTimeout", True),
        (400, "XAmzContentSHA256Mismatch", True),
        (403, "Forbidden", False),
        (405, "MethodNotAllowed", False),
        (409, "OperationAborted", True),
        (409, "InvalidBucketState", False),
        (411, "MissingContentLength", False),
        (429, "TooManyRequests", True),
        (500, "InternalError", True),
        (501, "NotImplemented", False),
        (503, "SlowDown", True),
    ],
)
def test_what_s3_refuses_is_not_waited_for(status: int, code: str, passes: bool) -> None:
    from s3fs.errors import translate_boto_error

    error = {"Code": code, "Message": "no"}
    facts = {"HTTPStatusCode": status, "RequestId": "", "HostId": "", "RetryAttempts": 0}
    answer = ClientError({"Error": error, "ResponseMetadata": {**facts, "HTTPHeaders": {}}}, "Put")
    assert is_outage(translate_boto_error(answer)) == passes
    assert is_outage(answer) == passes


OWN = "https://s3.example.org"
ON_DEMAND = {
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}


@pytest.mark.parametrize(
    ("environment", "profile", "configured", "expected"),
    [
        ({}, "", {}, {}),
        ({"AWS_ENDPOINT_URL": OWN}, "", {}, ON_DEMAND),
        ({"AWS_ENDPOINT_URL_S3": OWN}, "", {}, ON_DEMAND),
        ({"AWS_ENDPOINT_URL_SQS": OWN}, "", {}, {}),
        ({"AWS_ENDPOINT_URL": "https://s3.eu-west-1.amazonaws.com"}, "", {}, {}),
        ({"AWS_ENDPOINT_URL": "https://s3.eusc-de-east-1.amazonaws.eu"}, "", {}, {}),
        ({}, f"endpoint_url = {OWN}", {}, ON_DEMAND),
        ({}, f"services = a\n[services a]\ns3 =\n  endpoint_url = {OWN}", {}, ON_DEMAND),
        ({}, "", {"endpoint_url": OWN}, ON_DEMAND),
        ({}, "", {"client_kwargs": {"endpoint_url": OWN}}, ON_DEMAND),
        (
            {"AWS_ENDPOINT_URL": OWN, "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_supported"},
            "request_checksum_calculation = when_supported",
            {},
            {},
        ),
        ({"AWS_PROFILE": "absent", "AWS_ENDPOINT_URL": OWN}, "", {}, ON_DEMAND),
    ],
    ids=str,
)
def test_only_amazons_own_s3_gets_checksums_that_it_does_not_demand(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    profile: str,
    configured: dict[str, Any],
    expected: dict[str, str],
) -> None:
    file = tmp_path / "config"
    file.write_text(f"[default]\n{profile}\n")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    for name, value in ({"AWS_CONFIG_FILE": str(file)} | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec_config, "s3", configured)
    options = url_to_fs("s3://bucket/a", skip_instance_cache=True)[0].config_kwargs
    assert {name: options[name] for name in options if "checksum" in name} == expected


@pytest.mark.slow
@pytest.mark.usefixtures("s3_of_before_2025")
def test_a_store_that_knows_no_newer_checksums_has_artifacts_locks_and_deletions(
    url_of: UrlOf,
) -> None:
    store = Store(url_of("s3"))
    store.check_writable()
    with store.lock(PARTS.stage, PARTS.key) as lock:
        draft = store.draft(PARTS, lock)
        draft.write("a", b"alpha")
        artifact = draft.commit({}, {})
    assert artifact.read("a") == b"alpha"
    assert store.find(PARTS.stage, PARTS.key) == artifact
    store.fs.pipe_file(f"{store.root}/large", bytes(2**24), chunksize=5 * 2**20)
    delete_tree(store.fs, store.root)
    assert not store.fs.find(store.root)


@pytest.mark.slow
def test_amazons_own_s3_deletes_many_objects_by_one_request(
    url_of: UrlOf, requests_to: RequestsTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("artifacts.s3_client.AMAZON", ("127.0.0.1",))
    fs, root = url_to_fs(url_of("s3"), skip_instance_cache=True)
    for number in range(3):
        fs.pipe_file(f"{root}/{number}", b"a")
    before = len(requests_to("s3"))
    delete_tree(fs, root)
    assert not fs.find(root)
    assert [method for method, _ in requests_to("s3")[before:]].count("POST") == 1


def of_the_hub(status: int) -> Exception:
    asked = Request("GET", "http://hub.org")
    return HfHubHTTPError(f"{status}", response=Response(status, request=asked))


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (EndpointConnectionError(endpoint_url="http://127.0.0.1:9"), True),
        (ConnectionResetError("reset"), True),
        (TimeoutError(), True),
        (StoreRefused("503"), True),
        (StoreRefused("Forbidden: no"), False),
        (PermissionError("Access Denied"), False),
        (UnauthorizedSSOTokenError(), False),
        (NoCredentialsError(), True),
        (DefaultCredentialsError(), True),
        (HttpError({"code": 401, "message": "Anonymous caller"}), True),
        (HttpError({"code": 403, "message": "no"}), False),
        (HttpError({"code": 503, "message": "later"}), True),
        (InvalidURL("http:///"), False),
        (ParamValidationError(report="Invalid bucket name"), False),
        (of_the_hub(401), False),
        (of_the_hub(503), True),
        (HFValidationError("no such name"), False),
        (StrictDataclassFieldValidationError("size", TypeError("many")), False),
        (DecodeError("a damaged tokenizer"), False),
        (TypeError("a bug"), False),
    ],
)
def test_only_an_outage_may_pass(error: Exception, passes: bool) -> None:
    assert is_outage(error) == passes


def test_the_answer_of_a_web_server_is_read_by_its_present_name(
    recwarn: pytest.WarningsRecorder,
) -> None:
    """aiohttp's `code` is deprecated."""
    asked = RequestInfo(URL("http://a.org"), "GET", CIMultiDictProxy(CIMultiDict()))
    answers = (401, 403, 404, 408, 410, 429, 500, 503)
    passes = [n for n in answers if is_outage(ClientResponseError(asked, (), status=n))]
    assert passes == [408, 429, 500, 503] and not recwarn.list


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NoCredentialsError(), Away),  # a cloud's service of credentials may fail
        (UnauthorizedSSOTokenError(), Failed),
    ],
)
def test_what_a_store_without_credentials_needs_is_told(
    error: Exception, kind: type[Exception]
) -> None:
    said = "^no valid credentials for memory:///closed .*: log in by its cloud's tool, or set "
    with pytest.raises(kind, match=said) as found, storing(Store("memory://closed")):
        raise error
    assert type(found.value) is kind


def test_a_store_whose_name_no_bucket_can_have_is_not_waited_for() -> None:
    said = "^memory:///closed cannot be used .*Invalid bucket name.: correct its URL$"
    with pytest.raises(Failed, match=said) as found, storing(Store("memory://closed")):
        raise ParamValidationError(report="Invalid bucket name")
    assert type(found.value) is Failed


def test_a_valueerror_of_ours_is_not_of_a_client() -> None:
    try:
        int("one")
    except ValueError as error:
        assert not is_of_client(error)
