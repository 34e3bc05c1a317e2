#!/bin/bash
python3 - <<"END"
import sqlite3

database = sqlite3.connect("/app/shop.db")
database.execute("ALTER TABLE orders ADD COLUMN large INTEGER")
database.execute("UPDATE orders SET large = amount >= 20")
database.commit()
END
