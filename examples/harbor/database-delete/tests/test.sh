#!/bin/bash
echo 0 > /logs/verifier/reward.txt
timeout 10 python3 -I - <<"END"
import sqlite3

try:
    database = sqlite3.connect("/app/shop.db")
    right = database.execute("SELECT id, amount FROM orders ORDER BY id").fetchall() == [(1, 10), (2, 25), (4, 40)]
except sqlite3.Error:
    right = False
with open("/logs/verifier/reward.txt", "w") as file:
    file.write("1" if right else "0")
END
