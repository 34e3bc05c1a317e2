"""Database of one episode, and containment of hostile statements.

A statement is contained, in this order, by:

1. its text: one statement of a few kinds, short, with few SELECTs and JOINs. This has to be checked
first, because SQLite calls no hook while it prepares a statement, and nested common table
expressions take exponential time there;

2. SQLite's limits on lengths, columns, depth and terms, set on the connection;

3. the authorizer, an allow list: rows of the task's tables and pure functions. No other table,
schema change, transaction, PRAGMA, attached database, extension or recursion;

4. limits on virtual machine steps and processor time, checked while the statement runs. Steps end a
statement at the same point in every run; the time limit is for expensive single steps. It is the
thread's processor time, so a busy machine does not end a harmless statement;

5. the number of pages of the database, and of result rows that are read. Everything is in memory,
including SQLite's temporary files.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realhf.environments.sql.instance import SqlTable, words

Rows = Mapping[str, Mapping[Any, tuple[Any, ...]]]
"""Rows by table and primary key."""
STATEMENT_CHARS = 800
"""Maximum length of a statement in characters."""
MAX_SELECTS = 6
MAX_JOINS = 6
MAX_SELECTS_AFTER_WITH = 2
_CHECK_EVERY = 200
"""Number of virtual machine steps between two checks of the limits."""
_PAGE_BYTES = 1024
_FIRST_WORDS = ("SELECT", "WITH", "VALUES", "INSERT", "REPLACE", "UPDATE", "DELETE")
_LIMITS = (
    (sqlite3.SQLITE_LIMIT_LENGTH, 2000),
    (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 4 * STATEMENT_CHARS),
    (sqlite3.SQLITE_LIMIT_COLUMN, 24),
    (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 40),
    (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 4),
    (sqlite3.SQLITE_LIMIT_FUNCTION_ARG, 8),
    (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
    (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 40),
    (sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 1),
    (sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 1),
    (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
)
_FUNCTIONS = frozenset(
    words(
        """abs avg cast ceil ceiling coalesce count dense_rank first_value floor glob group_concat ifnull iif
        instr lag last_value lead length like lower ltrim max min mod nth_value ntile nullif percent_rank
        rank round row_number rtrim sign string_agg substr substring sum total trim typeof upper"""
    )
)
"""Allowed functions: pure, and unable to make a long value from short ones."""
_SCHEMA_TABLES = frozenset({"sqlite_master", "sqlite_schema"})
_WRITES = frozenset({sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE})
_DENIED_FEATURES = {
    sqlite3.SQLITE_PRAGMA: "PRAGMA",
    sqlite3.SQLITE_ATTACH: "ATTACH",
    sqlite3.SQLITE_DETACH: "DETACH",
    sqlite3.SQLITE_RECURSIVE: "recursive queries",
    sqlite3.SQLITE_TRANSACTION: "transactions",
    sqlite3.SQLITE_SAVEPOINT: "savepoints",
}


@dataclass(frozen=True)
class StatementLimits:
    """Limits on the time, memory and result of one SQL statement."""

    steps: int
    """Maximum number of steps of SQLite's virtual machine."""
    ms: float
    """Maximum processor time in milliseconds."""
    rows: int
    """Maximum number of result rows that are read."""
    kilobytes: int
    """Maximum size of the whole database in KiB."""


@dataclass(frozen=True)
class Result:
    """Result of a statement."""

    rows: tuple[tuple[Any, ...], ...] = ()
    """First rows of the result."""
    more: bool = False
    """Whether there were more rows."""
    changed: int | None = None
    """Number of changed rows; None for a statement that only reads."""
    error: str = ""
    """Error text; "" if the statement ran."""
    columns_read: frozenset[tuple[str, str]] = frozenset()
    """Columns that the statement read, as (table, column)."""


class Database:
    """In-memory SQLite database with the given tables. ``writable``: whether statements may change
    rows. Not thread-safe. Raises sqlite3.Error if the tables cannot be created."""

    def __init__(
        self, tables: Sequence[SqlTable], limits: StatementLimits, *, writable: bool
    ) -> None:
        self._limits = limits
        self._writable = writable
        self._tables = {table.name: table for table in tables}
        self._columns_read: set[tuple[str, str]] = set()
        self._denied_feature = ""
        self._steps = 0
        self._deadline_ns = 0
        self._connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False, cached_statements=0
        )
        try:
            self._fill(tables)
            self._lock_down()
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Free the database. Idempotent."""
        self._connection.close()

    def execute(self, statement: str) -> Result:
        """Run one untrusted statement of the policy. An error is returned in the result."""
        if refusal := find_refusal(statement):
            return Result(error=refusal)
        self._columns_read = set()
        self._denied_feature = ""
        self._steps = self._limits.steps
        self._deadline_ns = time.thread_time_ns() + round(self._limits.ms * 1e6)
        self._connection.set_authorizer(self._authorize)
        try:
            return self._run(statement)
        except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError, OverflowError) as error:
            return Result(error=self._error_text(error), columns_read=frozenset(self._columns_read))

    def rows(self) -> Rows:
        """Return the rows of every table."""
        self._steps = 1 << 60
        self._deadline_ns = 1 << 62
        self._connection.set_authorizer(None)
        return {
            name: {row[0]: row for row in self._connection.execute(f"SELECT * FROM {name}")}
            for name in self._tables
        }

    def _fill(self, tables: Sequence[SqlTable]) -> None:
        connection = self._connection
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        for table in tables:
            connection.execute(table.create_sql())
            marks = ", ".join("?" * len(table.columns))
            connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", table.rows)

    def _lock_down(self) -> None:
        connection = self._connection
        self._modules = {row[0] for row in connection.execute("PRAGMA module_list")}
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute(
            f"PRAGMA max_page_count = {self._limits.kilobytes * 1024 // _PAGE_BYTES}"
        )
        if not self._writable:
            connection.execute("PRAGMA query_only = ON")
        for limit, value in _LIMITS:
            connection.setlimit(limit, value)
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        connection.set_progress_handler(self._is_over_limit, _CHECK_EVERY)

    def _run(self, statement: str) -> Result:
        before = self._connection.total_changes
        cursor = self._connection.execute(statement)
        try:
            rows = tuple(cursor.fetchmany(self._limits.rows + 1))
            has_columns = cursor.description is not None
        finally:
            cursor.close()
        # A change with RETURNING counts its rows only when the cursor is closed.
        changed = self._connection.total_changes - before
        return Result(
            rows[: self._limits.rows],
            len(rows) > self._limits.rows,
            None if has_columns and not changed else changed,
            columns_read=frozenset(self._columns_read),
        )

    def _is_over_limit(self) -> bool:
        self._steps -= _CHECK_EVERY
        return self._steps < 0 or time.thread_time_ns() > self._deadline_ns

    def _authorize(
        self,
        action: int,
        first: str | None,
        second: str | None,
        schema: str | None,
        source: str | None,
    ) -> int:
        if self._is_allowed(action, first or "", second or "", schema):
            return sqlite3.SQLITE_OK
        if action in (*_WRITES, sqlite3.SQLITE_READ):
            # A table-valued function declares its columns, which SQLite reports as a schema change.
            denied = (
                "schema changes and table functions"
                if first in _SCHEMA_TABLES
                else f"table {first}"
            )
        elif action == sqlite3.SQLITE_FUNCTION:
            denied = f"function {second}"
        else:
            denied = _DENIED_FEATURES.get(action, "schema changes")
        self._denied_feature = self._denied_feature or denied
        return sqlite3.SQLITE_DENY

    def _is_allowed(self, action: int, first: str, second: str, schema: str | None) -> bool:
        if action == sqlite3.SQLITE_SELECT:
            return True
        if action == sqlite3.SQLITE_FUNCTION:
            return second.lower() in _FUNCTIONS
        if action == sqlite3.SQLITE_READ:
            self._columns_read.add((first, second))
            return (
                first in self._tables
                or first in _SCHEMA_TABLES
                or self._is_subquery(first, second, schema)
            )
        return action in _WRITES and self._writable and first in self._tables

    def _is_subquery(self, table: str, column: str, schema: str | None) -> bool:
        """Return whether SQLite asks for permission to read a common table expression of which no
        column is read. For tables provided by modules it asks in the same way; those are
        excluded."""
        return not (
            column or schema or table.startswith(("pragma_", "sqlite_")) or table in self._modules
        )

    def _error_text(self, error: Exception) -> str:
        if self._denied_feature:
            return f"not allowed: {self._denied_feature}"
        if str(error) == "interrupted":
            return "the statement takes too long"
        return " ".join(str(error).split()) or type(error).__name__


def find_refusal(statement: str) -> str:
    """Return why SQLite must not even prepare a statement; "" if it may."""
    if len(statement) > STATEMENT_CHARS:
        return f"a statement has at most {STATEMENT_CHARS} characters"
    words = [word.upper() for word in re.findall(r"[A-Za-z_]+", statement)]
    if not words or not statement.lstrip().upper().startswith(_FIRST_WORDS):
        return f"a statement begins with {', '.join(_FIRST_WORDS[:-1])} or {_FIRST_WORDS[-1]}"
    selects = words.count("SELECT") + words.count("VALUES")
    if selects > (MAX_SELECTS_AFTER_WITH if "WITH" in words else MAX_SELECTS):
        return "the statement has too many SELECTs"
    return "the statement has too many JOINs" if words.count("JOIN") > MAX_JOINS else ""
