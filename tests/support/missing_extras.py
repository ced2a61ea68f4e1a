"""Placeholders for what tests import from extras whose folder was deleted: the tests that use one of them are skipped,
the others of the same file run."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

# helpers of tests/extras that tests of the core import, too
HELPERS = ("fake_cluster", "fake_vllm")
MESSAGE = "{} belongs to an extra, whose folder palestra/extras/ is missing"


class Placeholder:
    """Every use of it fails."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def _fail(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModuleNotFoundError(MESSAGE.format(self._name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "pytestmark":  # pytest and inspect look for them at collection
            raise AttributeError(name)
        self._fail()

    __call__ = __iter__ = __len__ = __getitem__ = __contains__ = __mro_entries__ = __setattr__ = _fail
    __instancecheck__ = __subclasscheck__ = __eq__ = __fspath__ = _fail
    __hash__ = object.__hash__

    def __or__(self, other: object) -> Placeholder:  # `Name | None` in an annotation
        return self

    __ror__ = __or__


class PlaceholderModule(ModuleType):
    def __getattr__(self, name: str) -> Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.__name__}.{name}")


class MissingExtras:
    """Finds modules of extras, after all other finders have found none."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name in HELPERS or f"{name}.".startswith("palestra.extras."):
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


def install() -> None:
    sys.meta_path.append(MissingExtras())  # type: ignore[arg-type]
