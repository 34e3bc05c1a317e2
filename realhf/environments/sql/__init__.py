"""Questions about SQLite databases, and changes to them: an environment without a service.

    python -m realhf.launch experiment=grpo env=sql

Every episode has its own database in memory, whose tables, columns and rows are drawn from the
task's seed. The policy reads the tables and a request, and replies with one SQL statement per turn,
as plain text or in a fence. It reads rows (``a|b``, one per line, cut to
``env.observation_chars``), ``ok, 3 rows changed`` or ``error: ...``. There are eighteen templates
in five groups, each with unlimited instances:

- ``lookup``, ``aggregate``, ``join``: a question. The database is read-only. The policy answers
  once, with the line ``answer: VALUE``. Finding the answer with a statement earns 0.5, giving it
  the rest.
- ``change``, ``steps``: a change by one statement, or by several. All rows of all tables are
  compared after every statement, and the episode ends when they are exactly as asked. The reward is
  the progress towards that; net harm costs up to 0.2.

The rewards of an episode sum to 1 when it is solved, to 0 when nothing was done. The held-out split
combines tables with columns, and words to row names, in ways that the training split never does.

Statements are hostile input, see ``database`` for their containment: they only change rows of their
own database, access no file, and end within ``env.statement_ms`` of processor time. They run on the
event loop, because a typical one takes less than 0.1 ms. Statements have no random numbers and no
clock, so the same task and messages give the same turns; only a statement that reaches
``env.statement_ms`` before ``env.statement_steps`` may end differently on a faster machine.
"""

from __future__ import annotations

from realhf.environments.sql.definition import DEFINITION, SqlOptions, build

__all__ = ["DEFINITION", "SqlOptions", "build"]
