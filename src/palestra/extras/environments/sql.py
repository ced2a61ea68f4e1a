"""Questions about a small SQLite database."""

from __future__ import annotations

import random
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from palestra.core.files import scratch_root
from palestra.core.types import Score
from palestra.envs.env import Env
from palestra.extras.environments.calculator import is_number

_CITIES = "Ankara Bergen Cork Delft Evora Fes Graz Hue Izmir Jena".split()
_GOODS = "apples bread cheese dates eggs figs grapes honey".split()
_SCHEMA = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, age INTEGER);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers(id), good TEXT, amount INTEGER);
"""
# question -> the query that answers it
_QUESTIONS = {
    "How many customers live in {city}?": "SELECT count(*) FROM customers WHERE city = '{city}'",
    "How many customers of {city} are older than {age}?": (
        "SELECT count(*) FROM customers WHERE city = '{city}' AND age > {age}"
    ),
    "What is the total amount of {good} that was ordered?": "SELECT sum(amount) FROM orders WHERE good = '{good}'",
    "What is the total amount of {good} that customers of {city} ordered?": (
        "SELECT coalesce(sum(amount), 0) FROM orders JOIN customers ON customers.id = customer_id "
        "WHERE good = '{good}' AND city = '{city}'"
    ),
    "How many orders did customers younger than {age} make?": (
        "SELECT count(*) FROM orders JOIN customers ON customers.id = customer_id WHERE age < {age}"
    ),
}
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
_MAX_ROWS = 50
_MAX_SECONDS = 2.0


class Sql(Env):
    """Answer questions about a database by querying it."""

    name = "sql"
    works_in_forks = True
    instructions = "Answer with a number. Look at the tables, then query them with SQL."

    def setup(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="palestra-sql-", dir=scratch_root())
        self.path = Path(self.folder.name, "shop.sqlite")
        rng = random.Random(f"sql/{self.config.seed}")
        with closing(sqlite3.connect(self.path)) as database, database:
            database.executescript(_SCHEMA)
            people = [(i, f"customer {i}", rng.choice(_CITIES), rng.randint(18, 90)) for i in range(1, 201)]
            database.executemany("INSERT INTO customers VALUES (?, ?, ?, ?)", people)
            orders = [(i, rng.randint(1, 200), rng.choice(_GOODS), rng.randint(1, 20)) for i in range(1, 801)]
            database.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", orders)

    def make_problem(self, rng: random.Random) -> Any:
        question, query = rng.choice(list(_QUESTIONS.items()))
        words = {"city": rng.choice(_CITIES), "good": rng.choice(_GOODS), "age": rng.randint(20, 85)}
        query = query.format(**words)
        return {"input": question.format(**words), "expect": self._rows(query)[0][0], "query": query}

    def tables(self) -> str:
        """The tables of the database, as the statements that made them."""
        return _SCHEMA.strip()

    def query(self, sql: str) -> list[list[Any]]:
        """The rows that a SELECT gives, at most 50. The database cannot be changed.

        Args:
            sql: One SELECT statement.
        """
        return self._rows(sql)

    def _rows(self, sql: str) -> list[list[Any]]:
        ends = time.monotonic() + _MAX_SECONDS
        with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as database:
            database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
            database.set_progress_handler(lambda: time.monotonic() > ends, 10_000)
            return [list(row) for row in database.execute(sql).fetchmany(_MAX_ROWS)]

    def score(self, answer: str) -> Score:
        return is_number(answer, self.problem.expect)
