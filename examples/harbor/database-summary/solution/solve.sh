#!/bin/bash
python3 - <<"END"
import sqlite3

database = sqlite3.connect("/app/shop.db")
database.execute(
    "CREATE TABLE customers AS "
    "SELECT customer AS name, COUNT(*) AS orders FROM orders GROUP BY customer"
)
database.commit()
END
