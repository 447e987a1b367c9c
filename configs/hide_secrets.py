"""Hide the secrets of settings from Prefect, which stores the parameters of runs."""

from __future__ import annotations

from typing import Any

from pydantic import SecretStr

from configs.redact_urls import has_secrets, is_secret


def hide_secrets(settings: Any, name: str = "") -> Any:
    """The settings with each secret as a SecretStr, of which Prefect stores asterisks."""
    if isinstance(settings, dict):
        return {key: hide_secrets(value, key) for key, value in settings.items()}
    if isinstance(settings, list):
        return [hide_secrets(value, name) for value in settings]
    if isinstance(settings, SecretStr):
        return settings
    if is_secret(name, settings) or (isinstance(settings, str) and has_secrets(settings)):
        return SecretStr(str(settings))
    return settings
