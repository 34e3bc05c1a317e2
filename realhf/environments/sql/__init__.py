"""Asks questions about SQLite databases, and for changes to them: an environment of the second door, without a service.

    python -m realhf.launch experiment=grpo env=sql

Every episode has a database of its own, in memory, whose tables, columns and rows are drawn by the task's seed. The
policy reads the tables and a request, and replies with one SQL statement a turn, as plain text or in a fence; it reads
rows (``a|b``, one a line, cut to ``env.observation_chars``), ``ok, 3 rows changed`` or ``error: ...``. There are
eighteen templates in five groups, each an endless family:

- ``lookup``, ``aggregate``, ``join``: a question. The database is read-only. The policy answers with the line
  ``answer: VALUE``, once. Having found the answer by a statement is worth 0.5, giving it the rest.
- ``change``, ``steps``: a change by one statement, or by several. All rows of all tables are compared after every
  statement, and the episode ends when they are exactly as asked. The reward is how much closer they came; harm that
  outweighs it costs up to 0.2.

The rewards of an episode sum to 1 when it is solved, to 0 when nothing was done. The held-out split combines tables
with columns, and words to names of rows, as the training split never does.

Statements are hostile input. ``database`` says what contains them: they change nothing but rows of their own database,
reach no file, and end within ``env.statement_ms`` of processor time. They run on the event loop, because a usual one
takes less than a tenth of a millisecond. There are no random numbers and no clock in a statement, so the same task and
messages give the same turns; only a statement that ``env.statement_ms`` cuts off before ``env.statement_steps`` does
could end differently on a faster machine.
"""

from __future__ import annotations

from realhf.environments.sql.definition import DEFINITION, SqlOptions, build

__all__ = ["DEFINITION", "SqlOptions", "build"]
