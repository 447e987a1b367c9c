"""The errors that a user meets keep their words wherever they are shown."""

from configs.errors import Away, Refused, naming


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
