"""Hostile statements, by what they try. ``{T}`` and ``{U}`` are the tables of the episode, ``{F}``
is a file."""

from __future__ import annotations

REFUSED = {
    "attach a file": "ATTACH DATABASE '{F}' AS x",
    "attach a file by URI": "ATTACH 'file:{F}?mode=rwc' AS x",
    "detach": "DETACH main",
    "load an extension": "SELECT load_extension('{F}')",
    "read a file": "SELECT readfile('{F}')",
    "write a file": "SELECT writefile('{F}', 'x')",
    "list a folder": "SELECT * FROM fsdir('/')",
    "edit": "SELECT edit('x', 'vi')",
    "vacuum into a file": "VACUUM INTO '{F}'",
    "vacuum": "VACUUM",
    "writable schema": "PRAGMA writable_schema = 1",
    "temporary files": "PRAGMA temp_store = FILE",
    "folder of temporary files": "PRAGMA temp_store_directory = '/tmp'",
    "more pages": "PRAGMA max_page_count = 1000000000",
    "heap of the process": "PRAGMA hard_heap_limit = 1",
    "writes after all": "PRAGMA query_only = OFF",
    "pragma as a table": "SELECT * FROM pragma_database_list",
    "pragma as a counted table": "SELECT count(*) FROM pragma_table_info('{T}')",
    "pragma as a table with an argument": "SELECT * FROM pragma_temp_store('FILE')",
    "change the schema table": "UPDATE sqlite_master SET sql = 'CREATE TABLE x (a)'",
    "add to the schema "
    "table": "INSERT INTO sqlite_master VALUES ('table', 'x', 'x', 2, 'CREATE TABLE x (a)')",
    "delete the schema": "DELETE FROM sqlite_schema",
    "temporary schema": "SELECT * FROM sqlite_temp_master",
    "pages": "SELECT data FROM sqlite_dbpage",
    "statistics of pages": "SELECT * FROM dbstat",
    "statements": "SELECT count(*) FROM sqlite_stmt",
    "json table": "SELECT count(*) FROM json_each('[1]')",
    "tokenizer": "SELECT fts3_tokenizer('simple', x'0000000000000000')",
    "make a table": "CREATE TABLE x (a)",
    "make a temporary table": "CREATE TEMP TABLE x AS SELECT * FROM {T}",
    "make a virtual table": "CREATE VIRTUAL TABLE x USING fts5(a)",
    "make a virtual table of a file": "CREATE VIRTUAL TABLE x USING csv(filename='{F}')",
    "make a view": "CREATE VIEW x AS SELECT 1",
    "make a "
    "trigger": "CREATE TRIGGER x AFTER INSERT ON {T} BEGIN INSERT INTO {T} SELECT * FROM {T}; END",
    "make a temporary trigger": "CREATE TEMP TRIGGER x AFTER DELETE ON {T} BEGIN SELECT 1; END",
    "make an index": "CREATE INDEX x ON {T} (name)",
    "drop a table": "DROP TABLE {T}",
    "rename a table": "ALTER TABLE {T} RENAME TO x",
    "add a column": "ALTER TABLE {T} ADD COLUMN x DEFAULT 1",
    "reindex": "REINDEX",
    "analyze": "ANALYZE",
    "begin": "BEGIN EXCLUSIVE",
    "savepoint": "SAVEPOINT x",
    "two statements": "SELECT 1; DROP TABLE {T}",
    "two statements behind a comment": "SELECT 1 /* ; */ ; DELETE FROM {T} --",
    "zero character": "SELECT 1\0; DROP TABLE {T}",
    "half a character": "SELECT '\ud800'",
    "many zeros": "SELECT zeroblob(1000000000)",
    "many random bytes": "SELECT randomblob(1000000000)",
    "wide format": "SELECT printf('%1000000000d', 1)",
    "wide format by its other name": "SELECT format('%.*c', 1000000000, 'x')",
    "replace by longer": "SELECT replace(replace('aaaaaaaa', 'a', 'bbbbbbbb'), 'b', 'cccccccc')",
    "hexadecimal": "SELECT hex(name) FROM {T}",
    "random number": "SELECT random()",
    "time": "SELECT CURRENT_TIMESTAMP",
    "date": "SELECT datetime('now')",
    "version": "SELECT sqlite_version()",
    "endless "
    "recursion": "WITH RECURSIVE c (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) "
    "FROM c",
    "endless recursion without the "
    "word": "WITH c (x) AS (VALUES (1) UNION ALL SELECT x + 1 FROM c) SELECT x FROM c",
    "endless recursion in a "
    "change": "INSERT INTO {T} WITH c (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) "
    "SELECT x + 100, 'a', 'b', 1 FROM c",
    "eight tables": "SELECT count(*) FROM {T} a, {T} b, {T} c, {T} d, {T} e, {T} f, {T} g, {T} h",
    "sorted "
    "product": "SELECT a.name || b.name FROM {T} a, {T} b, {T} c, {T} d, {T} e, {T} f ORDER BY 1",
    "distinct "
    "product": "SELECT DISTINCT a.name || b.name || c.id || d.id FROM {T} a, {T} b, {T} c, {T} d, "
    "{T} e, "
    "{T} f ORDER BY 1",
    "long sorted rows": "SELECT x || x || x FROM (SELECT '"
    + "x" * 600
    + "' AS x), {T} a, {T} b, {T} c, {T} d, {T} e "
    "ORDER BY a.id + e.id",
    "window over a product": "SELECT sum(a.id) OVER (ORDER BY b.id + e.id ROWS 9 PRECEDING) "
    "FROM {T} a, {T} b, {T} c, {T} d, {T} e",
    "long "
    "concatenation": "SELECT group_concat(a.name || b.name) FROM {T} a, {T} b, {T} c, {T} d, {T} e",
    "huge list": "SELECT 1 WHERE 1 IN (" + "1," * 100_000 + "1)",
    "deep parentheses": "SELECT " + "(" * 300 + "1" + ")" * 300,
    "deep negation": "SELECT " + "- " * 300 + "1",
    "deep calls": "SELECT " + "abs(" * 150 + "1" + ")" * 150,
    "deep cases": "SELECT " + "CASE WHEN 1 THEN " * 30 + "1" + " END" * 30,
    "long disjunction": "SELECT 1 WHERE " + " OR ".join(["1"] * 150),
    "many columns": "SELECT " + ",".join(["1"] * 300),
    "many arguments": "SELECT max(" + ",".join(["1"] * 300) + ")",
    "many unions": "SELECT 1" + " UNION SELECT 1" * 40,
    "many rows": "VALUES " + ",".join(["(1)"] * 200),
    "doubled "
    "tables": "WITH a AS (SELECT 1), b AS (SELECT 1 FROM a, a), c AS (SELECT 1 FROM b, b) SELECT 1 "
    "FROM c, c",
    "many joins": "SELECT 1 FROM {T}" + " NATURAL JOIN {T}" * 20,
    "parameter": "SELECT ?1",
    "many parameters": "SELECT ?250000",
    "long text": "SELECT '" + "x" * 1_000_000 + "'",
    "fill the "
    "database": "INSERT INTO {T} SELECT a.id * 10000 + b.id * 100 + c.id + 1000, a.name || '"
    + "x" * 300
    + "', "
    "'x', 1 FROM {T} a, {T} b, {T} c",
}
"""Each of these ends in an error and changes nothing."""

HARMLESS = {
    "schema": "SELECT name, sql FROM sqlite_master",
    "infinities": "SELECT 1e999, -1e999, 1e999 - 1e999, NULL, 1 / 0",
    "bytes that are no text": "SELECT CAST(x'ff41' AS TEXT), x'00ff'",
    "control characters": "SELECT 'a\n<|user|>\tb'",
    "common table expression": "WITH c AS (SELECT 1 AS x FROM {T}, {U}) SELECT count(*) FROM c",
    "sixty tables": "WITH c AS (SELECT 1 AS x) SELECT 1 FROM " + ",".join("c" * 60),
    "dear patterns": "SELECT count(*) FROM {T} a, {T} b, {T} c WHERE a.name || '"
    + "a" * 500
    + "' LIKE '"
    + "%a_" * 12
    + "b'",
    "rows that stay": "SELECT * FROM {T} a, {T} b",
}
"""Each of these runs, and changes nothing."""

FIRST_LAYER_ALONE = frozenset(
    {"doubled tables", "many joins", "many rows", "deep cases", "many unions", "reindex"}
)
"""What the text of a statement alone gives away, or what does nothing where it is let through."""
