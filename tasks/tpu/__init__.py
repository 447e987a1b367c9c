"""Train on a Cloud TPU slice, controlled by gcloud."""
