"""Settings of servers: dataclass fields that are also command-line flags and environment variables.

A flag overrides its variable, and a variable overrides the default. Flags and variables are strings
and are converted here, so that a mistake gives the same error wherever it was made. Servers do not
read the process environment for anything else.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Self

from realhf.base.loopback import is_loopback_host
from realhf.web.certificates import certificate_problem

TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off", "")
_TYPES: Mapping[str, type] = {"str": str, "int": int, "float": float}


class SettingError(ValueError):
    """Raised for a setting that is unknown, out of range, or contradicts another one; the message
    names it."""


def setting(
    default: Any = MISSING,
    about: str = "",
    *,
    limits: tuple[float, float] | None = None,
    choices: Sequence[str] = (),
    bare: str | None = None,
) -> Any:
    """Declare a field of a ``Settings`` class.

    ``about``: one line for ``--help``. ``limits``: the smallest and the largest value. ``choices``:
    the allowed words. ``bare``: the value if the flag is given without a value. A field without a
    default is a required flag, and a required keyword argument of the class.
    """
    metadata = {"about": about, "limits": limits, "choices": tuple(choices), "bare": bare}
    return field(default=default, metadata=metadata, kw_only=default is MISSING)


@dataclass(frozen=True)
class Settings:
    """Base class for the settings of one program. Raises SettingError for a value out of range."""

    PREFIX: ClassVar[str] = ""
    """Prefix of the environment variables; "" if the program reads none."""
    UNPREFIXED: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Environment variables, by setting, whose name is not the prefix plus the flag's name."""
    FLAGS: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Flags, by setting and without dashes, whose name differs from the setting's name."""
    FOREIGN: ClassVar[frozenset[str]] = frozenset()
    """Variables, given without the prefix, that have the prefix but belong to other programs."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            limits = each.metadata["limits"]
            choices = each.metadata["choices"]
            if limits and value is not None and not limits[0] <= value <= limits[1]:
                raise SettingError(
                    f"{self.setting_label(each.name)} is {value}; allowed: {_range_text(*limits)}"
                )
            if choices and value not in choices and value != each.default:
                raise SettingError(
                    f"{self.setting_label(each.name)} is {value!r}; allowed: {', '.join(choices)}"
                )

    @classmethod
    def flag(cls, name: str) -> str:
        """Return the flag of a setting, with its dashes."""
        return f"--{cls.FLAGS.get(name, name).replace('_', '-')}"

    @classmethod
    def variable(cls, name: str) -> str:
        """Return the name of a setting's environment variable; "" if the program reads none."""
        if not cls.PREFIX:
            return ""
        return cls.UNPREFIXED.get(name) or cls.PREFIX + cls.flag(name)[2:].replace("-", "_").upper()

    @classmethod
    def setting_label(cls, name: str) -> str:
        """Return the name of a setting for messages: its variable, if it has one, and its flag."""
        variable = cls.variable(name)
        return f"{variable} ({cls.flag(name)})" if variable else cls.flag(name)

    @classmethod
    def add_arguments(cls, parser: argparse._ActionsContainer) -> None:
        """Add one flag for each setting. If a flag is not given, the variable or the default
        applies."""
        for each in fields(cls):
            _add_argument(parser, cls, each)

    @classmethod
    def resolve(
        cls,
        arguments: argparse.Namespace | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Return the settings: values from parsed ``arguments``, then from environment variables,
        then defaults. ``environment`` replaces the process environment. Raises SettingError, also
        for an unknown variable with the prefix."""
        environment = os.environ if environment is None else environment
        texts = cls._texts_of_variables(environment) if cls.PREFIX else {}
        for each in fields(cls):
            text = getattr(arguments, each.name, None)
            if text is not None:
                texts[each.name] = text
        return cls(
            **{
                each.name: _convert(cls, each, texts[each.name])
                for each in fields(cls)
                if each.name in texts
            }
        )

    @classmethod
    def parse(cls, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Self:
        """Return the settings for a command line that contains only these flags."""
        parser = argparse.ArgumentParser()
        cls.add_arguments(parser)
        return cls.resolve(parser.parse_args(arguments), environment)

    def to_environment(self) -> dict[str, str]:
        """Return the environment variables that give a child process the same settings."""
        return {
            self.variable(each.name): str(getattr(self, each.name))
            for each in fields(self)
            if getattr(self, each.name) != each.default
        }

    @classmethod
    def _texts_of_variables(cls, environment: Mapping[str, str]) -> dict[str, str]:
        names = {cls.variable(each.name): each.name for each in fields(cls)}
        texts: dict[str, str] = {}
        for variable, text in environment.items():
            if variable in names:
                texts[names[variable]] = text
            elif (
                variable.startswith(cls.PREFIX)
                and variable.removeprefix(cls.PREFIX) not in cls.FOREIGN
            ):
                raise SettingError(
                    f"unknown setting {variable} (known: {', '.join(sorted(names))})"
                )
        return texts


def _add_argument(
    parser: argparse._ActionsContainer, kind: type[Settings], each: Field[Any]
) -> None:
    flag = kind.flag(each.name)
    about = each.metadata["about"]
    if each.default not in (MISSING, None, "", False):
        about += f"; default {each.default}"
    if variable := kind.variable(each.name):
        about += f" [{variable}]"
    type_name = _type_name(each)
    bare = "true" if type_name == "bool" else each.metadata["bare"]
    parser.add_argument(
        flag,
        dest=each.name,
        default=None,
        required=each.default is MISSING,
        metavar=type_name.upper(),
        help=about.replace("%", "%%"),
        **({} if bare is None else {"nargs": "?", "const": bare}),
    )
    if type_name == "bool":
        about = f"the opposite of {flag}"
        parser.add_argument(
            f"--no-{flag[2:]}", dest=each.name, action="store_const", const="false", help=about
        )


def _convert(kind: type[Settings], each: Field[Any], text: str) -> str | int | float | bool:
    type_name = _type_name(each)
    if type_name == "bool":
        if text.lower() not in (*TRUE_WORDS, *FALSE_WORDS):
            raise SettingError(f"{kind.setting_label(each.name)} is {text!r}; give 1 or 0")
        return text.lower() in TRUE_WORDS
    try:
        value = _TYPES[type_name](text)
    except ValueError:
        value = math.nan
    if value != value:
        expected = "a whole number" if type_name == "int" else "a number"
        raise SettingError(f"{kind.setting_label(each.name)} is {text!r}; give {expected}")
    return value


def _type_name(each: Field[Any]) -> str:
    """Return ``str``, ``int``, ``float`` or ``bool`` for a field, also for an optional one. The
    field's type is a string, because modules with settings import ``annotations`` from
    ``__future__``."""
    return str(each.type).removesuffix(" | None")


def _range_text(minimum: float, maximum: float) -> str:
    return f"at least {minimum}" if maximum == math.inf else f"{minimum} to {maximum}"


@dataclass(frozen=True)
class ServerSettings(Settings):
    """Base class for the settings of an HTTP server.

    Raises SettingError if other machines could reach the server without a token (unless the user
    explicitly chose that), and for a certificate that cannot be loaded.
    """

    host: str = setting("127.0.0.1", "address to listen on; other than loopback it needs a token")
    port: int = setting(0, "port of the server; 0: any free port", limits=(0, 65535))
    allowed_hosts: str = setting(
        "", "names (with commas) that clients may call the server by, besides its own"
    )
    tls_cert: str = setting(
        "", "file with the certificate (PEM) of the server, which speaks https with it"
    )
    tls_key: str = setting("", "file with the private key of the certificate")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_loopback_host(self.host) and not self.asks_for_token:
            raise SettingError(
                f"{self.setting_label('host')} is {self.host!r}, not a loopback address; it needs "
                f"{self.token_names}"
            )
        if problem := certificate_problem(self.tls_cert, self.tls_key, self.tls_names):
            raise SettingError(problem)

    @property
    def asks_for_token(self) -> bool:
        """Whether clients need a token, or the user explicitly chose to run without one."""
        raise NotImplementedError

    @property
    def token_names(self) -> str:
        """Names of the settings that would allow the server to listen beyond the loopback, for
        error messages."""
        return self.setting_label("token")

    @property
    def tls_names(self) -> tuple[str, str]:
        """Names of the settings for the certificate and the private key, for error messages."""
        return self.setting_label("tls_cert"), self.setting_label("tls_key")

    @property
    def allowed_names(self) -> frozenset[str]:
        """The names of ``allowed_hosts``, in lower case and without brackets."""
        names = (name.strip().strip("[]").lower() for name in self.allowed_hosts.split(","))
        return frozenset(names) - {""}
