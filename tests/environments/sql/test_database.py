"""A database runs ordinary SQL, ends what takes too long at the same step, and stays small."""

from __future__ import annotations

import pytest

from realhf.environments.sql.database import Database, StatementLimits
from realhf.environments.sql.instance import SqlTable
from tests.cheapest import cheapest

ROWS = tuple(
    (number, f"row-{number}", "oslo" if number % 2 else "rome", number * 10)
    for number in range(1, 9)
)
THINGS = SqlTable(
    "small_things", ("id", "name", "city", "price"), ("INTEGER", "TEXT", "TEXT", "INTEGER"), ROWS
)
CITIES = SqlTable(
    "big_cities", ("city", "region"), ("TEXT", "TEXT"), (("oslo", "north"), ("rome", "south"))
)
LIMITS = StatementLimits(steps=100_000, ms=20.0, rows=4, kilobytes=64)


@pytest.fixture
def database():
    found = Database((THINGS, CITIES), LIMITS, writable=True)
    yield found
    found.close()


@pytest.mark.parametrize(
    "statement, rows",
    [
        ("SELECT price FROM small_things WHERE name = 'row-3'", ((30,),)),
        ("select Price from SMALL_THINGS where id in (3)", ((30,),)),
        (
            "SELECT count(*), sum(price), avg(price), min(name) FROM small_things",
            ((8, 360, 45.0, "row-1"),),
        ),
        (
            "SELECT region FROM small_things JOIN big_cities USING (city) WHERE id = 1",
            (("north",),),
        ),
        (
            "SELECT city, count(*) FROM small_things GROUP BY city HAVING count(*) > 1 ORDER BY 1",
            (("oslo", 4), ("rome", 4)),
        ),
        ("WITH c AS (SELECT city FROM big_cities) SELECT count(*) FROM c", ((2,),)),
        ("SELECT name FROM (SELECT * FROM small_things WHERE price > 70)", (("row-8",),)),
        (
            "SELECT upper(name) || '!' FROM small_things WHERE name LIKE '%8' LIMIT 1",
            (("ROW-8!",),),
        ),
        ("SELECT rank() OVER (ORDER BY price DESC) FROM small_things WHERE id = 8", ((1,),)),
        ("SELECT CASE WHEN price > 5 THEN 'a' END FROM small_things WHERE id = 1", (("a",),)),
        ("SELECT CAST(price AS TEXT) FROM small_things WHERE id = 1", (("10",),)),
        (
            "SELECT name FROM sqlite_master WHERE type = 'table'",
            (("small_things",), ("big_cities",)),
        ),
        ("VALUES (1, 2)", ((1, 2),)),
    ],
)
def test_ordinary_queries_run(database: Database, statement: str, rows: tuple):
    result = database.execute(statement)
    assert (result.error, result.rows, result.changed, result.more) == ("", rows, None, False)


@pytest.mark.parametrize(
    "statement, changed",
    [
        ("UPDATE small_things SET price = 1 WHERE city = 'oslo'", 4),
        (
            "UPDATE small_things SET price = (SELECT price FROM small_things WHERE id = 1) WHERE "
            "id = 2",
            1,
        ),
        ("DELETE FROM small_things", 8),
        (
            "INSERT INTO small_things (id, name, city, price) VALUES (20, 'a', 'b', 1), (21, 'a', "
            "'b', 1)",
            2,
        ),
        ("INSERT INTO small_things SELECT id + 100, name, city, price FROM small_things", 8),
        ("REPLACE INTO big_cities VALUES ('oslo', 'east')", 1),
        (
            "WITH c AS (SELECT 1 AS x) UPDATE small_things SET price = 1 WHERE id IN (SELECT x "
            "FROM c)",
            1,
        ),
        ("UPDATE small_things SET price = 1 WHERE id = 99", 0),
    ],
)
def test_ordinary_changes_run(database: Database, statement: str, changed: int):
    result = database.execute(statement)
    assert (result.error, result.rows, result.changed) == ("", (), changed)


def test_a_failed_change_changes_nothing(database: Database):
    before = database.rows()
    assert "UNIQUE" in database.execute("UPDATE small_things SET id = 3").error
    assert "NOT NULL" in database.execute("UPDATE small_things SET price = NULL").error
    assert database.rows() == before


def test_a_result_says_what_it_read(database: Database):
    read = database.execute("SELECT price FROM small_things WHERE name = 'row-3'").columns_read
    assert read == {("small_things", "price"), ("small_things", "name")}
    assert database.execute("SELECT 1").columns_read == frozenset()


def test_a_repeated_statement_says_again_what_it_read(database: Database):
    """A statement from a cache would not be asked about again."""
    first, second = (
        database.execute("SELECT price FROM small_things").columns_read for _ in range(2)
    )
    assert first == second == {("small_things", "price")}


def test_a_result_has_at_most_so_many_rows(database: Database):
    result = database.execute("SELECT id FROM small_things ORDER BY id DESC")
    assert (result.rows, result.more) == (((8,), (7,), (6,), (5,)), True)


def test_a_change_is_whole_although_not_all_of_its_rows_are_read(database: Database):
    result = database.execute("DELETE FROM small_things RETURNING id")
    assert (len(result.rows), result.more, result.changed) == (4, True, 8)
    assert database.rows()["small_things"] == {}


def test_steps_end_a_statement_at_the_same_place_every_time():
    """How far a change came is no question of time: it is undone."""
    found = []
    for _ in range(3):
        database = Database((THINGS,), StatementLimits(2000, 1000.0, 4, 64), writable=True)
        error = database.execute(
            "UPDATE small_things SET price = (SELECT count(*) FROM small_things a, small_things b, "
            "small_things c, small_things d)"
        ).error
        found.append((error, database.rows()))
        database.close()
    assert found[0][0] == "the statement takes too long"
    assert found[0] == found[1] == found[2]


def test_time_ends_a_statement_whose_steps_are_dear():
    database = Database((THINGS,), StatementLimits(10**12, 10.0, 4, 64), writable=False)
    pattern = "%a_" * 12
    statement = (
        f"SELECT count(*) FROM small_things a, small_things b, small_things c, small_things d, "
        f"small_things e, "
        f"small_things f WHERE a.name || f.name || '{'a' * 400}' LIKE '{pattern}b'"
    )
    errors: list[str] = []
    took = cheapest(lambda: errors.append(database.execute(statement).error), 0.03)
    assert set(errors) == {"the statement takes too long"}
    assert 0.009 < took < 0.03


def test_a_statement_after_one_that_was_cut_off_has_its_own_limits(database: Database):
    product = "SELECT count(*) FROM " + ", ".join(f"small_things t{number}" for number in range(9))
    for _ in range(3):
        assert database.execute(product).error == "the statement takes too long"
        assert database.execute("SELECT 1").rows == ((1,),)


def test_a_database_stays_small(database: Database):
    """Pages are counted: in the end nothing more fits."""
    errors = []
    for step in range(1, 60):
        statement = (
            f"INSERT INTO small_things SELECT id + {step * 100}, '{'x' * 300}', 'x', 1 FROM "
            f"small_things LIMIT 20"
        )
        errors.append(database.execute(statement).error)
    assert "database or disk is full" in errors[-1]
    assert len(database.rows()["small_things"]) < 200


@pytest.mark.parametrize(
    "statement",
    [
        "",
        ";",
        "hello",
        "selected",
        "\u00a0",
        "x" * 5000,
        "SELECT '",
        'SELECT "nothing"',
        "🙂",
        "SELECT /*",
    ],
)
def test_nonsense_is_an_error(database: Database, statement: str):
    error = database.execute(statement).error
    assert error == "" if '"nothing"' in statement else error


def test_closing_twice_is_fine():
    database = Database((THINGS,), LIMITS, writable=False)
    database.close()
    database.close()
