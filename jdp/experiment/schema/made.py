"""A table of an experiment file that may name a function of the user's own: `make`, and its keywords beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, ModelWrapValidatorHandler, PrivateAttr, ValidationInfo, model_validator

from jdp.base.errors import UserError
from jdp.experiment.make import MakeError, check_keywords, function_of, users_traceback
from jdp.experiment.schema.fields import NONE, Section, package_name


def _make_name(make: str) -> str:
    module, _, function = make.partition(":")
    if not re.fullmatch(r"[A-Za-z_]\w{0,99}", function):
        raise UserError('must be "package.module:function"')
    package_name(module)
    return make


class Made(Section):
    """A table with jdp's own keys; or with `make`, the keys of `_shared`, and the function's keywords."""

    make: Annotated[str, AfterValidator(_make_name)] | None = None
    """"package.module:function": your function in place of jdp's; the other keys of the table are its keywords. The
    package is imported only if --plugin names it on the command line."""

    _shared: ClassVar[tuple[str, ...]] = ()
    """jdp's keys that the table may have beside `make`."""
    _arguments: ClassVar[tuple[str, ...]] = ()
    """What jdp passes to the function by position."""
    _keywords: dict[str, Any] = PrivateAttr(default_factory=dict[str, Any])

    @model_validator(mode="wrap")
    @classmethod
    def _take_keywords(cls, table: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        if not isinstance(table, Mapping) or table.get("make") in (None, NONE):
            return handler(table)
        given: Mapping[str, Any] = table
        made = handler({key: value for key, value in given.items() if key in ("make", *cls._shared)})
        keywords = {
            key: None if value == NONE else value for key, value in given.items() if key not in ("make", *cls._shared)
        }
        assert made.make is not None
        check_keywords(made.make, cls._arguments, keywords, info.context)
        made._keywords.update(keywords)
        return made

    @property
    def keywords(self) -> dict[str, Any]:
        """The function's keywords, as in the file."""
        return self._keywords

    def call(self, *arguments: Any) -> Any:
        """Call the function with these arguments and the file's keywords.

        Raises:
            MakeError: the function raises an exception; the message has the user's own lines.
        """
        assert self.make is not None
        function = function_of(self.make)
        try:
            return function(*arguments, **self.keywords)
        except Exception as error:
            raise MakeError(f"{self.make} raised an exception:\n{users_traceback(error)}") from None

    def written(self) -> dict[str, Any]:
        """Return the keys of a table with `make`, as they are in the file."""
        return {key: getattr(self, key) for key in ("make", *self._shared)} | self.keywords
