"""Engine `ssh`: what it asks of the OpenSSH client."""

import sys
from pathlib import Path

import pytest
import ssh_hosts

from configs.settings.clusters import Ssh
from tasks.hosts import ssh
from tasks.hosts.engine import passed_environment


def test_a_host_is_never_read_as_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in refuses a command line without `--`, as settings refuse names with `-`."""
    ssh_hosts.stand_in(tmp_path, monkeypatch)
    hosts = ("-oProxyCommand=false", "two")
    settings = Ssh(hosts=("one", "two")).model_copy(update={"hosts": hosts})
    ssh.check(settings, sys.executable, str(tmp_path))


def test_hosts_get_the_variables_of_cann_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_OPP_PATH", "/usr/local/Ascend/opp")
    monkeypatch.setenv("HCCL_SOCKET_IFNAME", "eth1")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
    passed = passed_environment()
    assert passed["ASCEND_OPP_PATH"] == "/usr/local/Ascend/opp"
    assert passed["HCCL_SOCKET_IFNAME"] == "eth1"
    assert not {"HF_TOKEN", "ASCEND_RT_VISIBLE_DEVICES"} & passed.keys()
