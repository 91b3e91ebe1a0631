"""The error tree, and a package that is light to import and explains itself."""

import pickle
import subprocess
import sys

import pytest

import flexstream
from flexstream import errors, missing_build

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]


def test_text_has_message_and_hint():
    error = errors.QueryError("no column 'x'", code="unknown_field", hint="did you mean y?")
    assert "no column 'x'" in str(error)
    assert "did you mean y?" in str(error)
    assert error.to_dict() == {"code": "unknown_field", "message": "no column 'x'", "hint": "did you mean y?"}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_one_of_ours_with_a_code_of_its_own_and_survives_pickling(kind):
    error = kind("it broke", hint="mend it")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, errors.FlexStreamError)
    assert type(again) is kind
    assert again.to_dict() == error.to_dict()
    assert error.code


def test_every_public_name_exists_and_is_documented():
    for name in flexstream.__all__:
        if name not in flexstream._LAZY:
            assert getattr(flexstream, name).__doc__, name
    assert set(flexstream.__all__) <= set(dir(flexstream))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Enigne"):
        flexstream.Enigne  # noqa: B018


def test_import_stays_light():
    heavy = (
        "pyarrow",
        "pandas",
        "polars",
        "pyspark",
        "rich",
        "aiohttp",
        "asyncio",
        "nic",
        "state",
        "cython_ext",
    )
    code = f"import sys, flexstream; print(*[name for name in {heavy!r} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.split() == []


def test_an_uncompiled_extension_names_the_commands_that_build_it():
    with pytest.raises(ImportError) as caught:
        missing_build.load("never_compiled")
    assert "scripts/test" in str(caught.value)
    assert "pip install -e ." in str(caught.value)


def test_a_lazy_name_over_an_uncompiled_extension_explains_itself(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name="flexstream.cython_ext.worker.worker")

    monkeypatch.delitem(vars(flexstream), "Engine", raising=False)
    monkeypatch.setattr(flexstream.importlib, "import_module", broken)
    with pytest.raises(ImportError, match=r"pip install -e \."):
        flexstream.Engine  # noqa: B018
