import sqlite3
from pathlib import Path

database = sqlite3.connect("shop.db")
database.executescript(Path("shop.sql").read_text())
database.commit()
