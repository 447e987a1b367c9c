"""Engine `ssh`: what it asks of the OpenSSH client."""

import sys
from pathlib import Path

import pytest
import ssh_hosts

from configs.settings.clusters import Ssh
from tasks.hosts import ssh


def test_a_host_is_never_read_as_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in refuses a command line without `--`, as settings refuse names with `-`."""
    ssh_hosts.stand_in(tmp_path, monkeypatch)
    hosts = ("-oProxyCommand=false", "two")
    settings = Ssh(hosts=("one", "two")).model_copy(update={"hosts": hosts})
    ssh.check(settings, sys.executable, str(tmp_path))
