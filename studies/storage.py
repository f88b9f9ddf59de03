# SPDX-License-Identifier: Apache-2.0
"""Opens the database of studies: SQLite in a file, or PostgreSQL by its address."""

import contextlib
import json
import pathlib
import time
from collections.abc import Callable
from typing import TypeVar

from configs.errors import ConfigError, shown
from files.json_reader import JsonError
from settings.keys import HIDDEN

try:
    import optuna
    import sqlalchemy
    from sqlalchemy import exc
except ModuleNotFoundError as missing:
    raise ConfigError(f"studies need the package {missing.name}: run `make setup EXTRAS=studies`") from None

WAIT_SECONDS = 30  # for another process that writes
EXAMPLES = "use sqlite:///studies.db or postgresql://USER@HOST/DATABASE"
KINDS = ("sqlite", "postgresql")
TRIES, TRY_SECONDS = 20, 0.5  # to make tables that another process makes at the same moment
Made = TypeVar("Made")
optuna.logging.set_verbosity(optuna.logging.WARNING)


def open_storage(url: str, *, create: bool, is_known: bool = False) -> optuna.storages.RDBStorage:
    """Return the storage at a URL; make its tables if there are none.

    Args:
      create: whether to make a file that does not exist.
      is_known: whether this command has opened it before, so that its address is right.

    Raises:
      ConfigError: the URL is malformed or of another kind of database, or the database cannot be reached or used.
      OutOfReach: a file is locked, or a database that is known cannot be reached.
    """
    address = _address(url)
    said = address.render_as_string()  # without the password
    options, advice = {"connect_args": {"timeout": WAIT_SECONDS}}, "restore the file, or name another"
    if address.get_backend_name() == "sqlite":
        _check_file(url, address.database, create=create)
    else:
        options, advice = {"connect_args": {"connect_timeout": WAIT_SECONDS}, "pool_pre_ping": True}, EXAMPLES
        address = address.set(drivername="postgresql+psycopg")
    try:
        return made(lambda: optuna.storages.RDBStorage(address.render_as_string(hide_password=False), options))
    except ImportError:
        raise ConfigError(f"--storage={said} needs the package psycopg: run `make setup EXTRAS=studies`") from None
    except (exc.SQLAlchemyError, RuntimeError) as error:  # Optuna's RuntimeError: tables of another version
        if isinstance(error, exc.OperationalError) and (is_known or "locked" in str(error.orig)):
            raise OutOfReach(error) from None
        reason = " ".join(str(getattr(error, "orig", None) or error).split())[:200]
        raise ConfigError(f"--storage={said} cannot be used: {reason}; {advice}") from None


class OutOfReach(RuntimeError):
    """The database does not answer, or is locked for too long; the same command continues."""

    exit_status = 75

    def __init__(self, error: exc.OperationalError):
        reason = " ".join(str(error.orig).split())
        super().__init__(f"the database is out of reach: {reason}; run the same command to continue")


@contextlib.contextmanager
def reaching():
    """Raise OutOfReach or ConfigError for errors of SQLAlchemy and Optuna about a database that cannot be used."""
    try:
        yield
    except (exc.DatabaseError, optuna.exceptions.StorageInternalError) as error:
        cause = error if isinstance(error, exc.DatabaseError) else error.__cause__
        if isinstance(cause, exc.DatabaseError) and "malformed" in str(cause.orig):
            raise ConfigError(f"--storage is damaged: {cause.orig}; restore the file, or name another") from error
        if not isinstance(cause, exc.OperationalError):
            raise
        if "readonly" in str(cause.orig):
            raise ConfigError("--storage is a file that cannot be written here; name another") from error
        raise OutOfReach(cause) from error


@contextlib.contextmanager
def understood(what: str):
    """Raise ConfigError if stored text is not JSON, and is `what` in the message, or does not match its schema."""
    try:
        yield
    except (json.JSONDecodeError, JsonError) as error:  # someone has edited the database
        reason = str(error) if isinstance(error, JsonError) else f"{what}: is not valid JSON ({error})"
        raise ConfigError(f"{reason}; restore the database of --storage, or name another") from None


def study_names(url: str) -> list[str]:
    """Return the names of the studies and searches in the storage at a URL. Raises ConfigError as `open_storage`."""
    return sorted(optuna.get_all_study_names(open_storage(url, create=False)))


def made(make: Callable[[], Made]) -> Made:
    """Return what `make` returns. It makes tables, and is called again if another process made them meanwhile."""
    for _ in range(TRIES - 1):
        try:
            return make()
        except exc.SQLAlchemyError as error:
            if not isinstance(error, exc.IntegrityError) and "already exists" not in str(error):
                raise
        time.sleep(TRY_SECONDS)
    return make()


def _address(url: str) -> sqlalchemy.URL:
    try:
        address = sqlalchemy.make_url(url)
        kind = address.get_backend_name()
    except (exc.ArgumentError, ValueError):
        named = HIDDEN if "@" in url else shown(url)  # it may have a password
        raise ConfigError(f"--storage={named} is not the URL of a database; {EXAMPLES}") from None
    if kind not in KINDS:
        raise ConfigError(f"--storage: studies are kept in SQLite or PostgreSQL, not in {kind}; {EXAMPLES}")
    return address


def _check_file(url: str, name: str | None, *, create: bool) -> None:
    if not name or name == ":memory:":
        raise ConfigError(f"--storage={url} names no file, which several processes could share; {EXAMPLES}")
    path = pathlib.Path(name)
    if not path.parent.is_dir():
        raise ConfigError(f"--storage={url}: the folder {path.parent} does not exist; create it, or name another")
    if not create and not path.is_file():
        raise ConfigError(f"--storage={url}: there is no such file; `sweep.py run NAME` begins one")
