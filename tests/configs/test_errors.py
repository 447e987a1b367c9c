"""The errors that a user meets keep their words wherever they are shown."""

import pytest

from configs.errors import Away, Refused, UserError, naming


def test_a_logged_error_has_its_setting_and_remedy() -> None:
    error = Away("it cannot be used now", setting="store", remedy="run again later")
    assert repr(error) == "Away('store: it cannot be used now: run again later')"


def test_a_remedy_has_no_secrets() -> None:
    assert "word" not in str(Refused("no", remedy="kiln plan s3://me:word@host/recipe.yaml"))


def test_the_first_setting_and_remedy_count() -> None:
    error = Refused("no", setting="a", remedy="do this")
    try:
        with naming("b", "do that"):
            raise error
    except Refused as raised:
        assert str(raised) == "a: no: do this"


@pytest.mark.parametrize(("kind", "remedy"), [(Refused, ": set another"), (Away, "")])
def test_an_outage_is_not_mended_by_another_setting(kind: type[UserError], remedy: str) -> None:
    with pytest.raises(kind) as raised, naming("model.path", "set another"):
        raise kind("it cannot be read")
    assert str(raised.value) == f"model.path: it cannot be read{remedy}"
