#!/bin/bash
python3 - <<"END"
import sqlite3

database = sqlite3.connect("/app/shop.db")
total = database.execute("SELECT SUM(amount) FROM orders WHERE customer = 'ada'").fetchone()[0]
open("/app/answer.txt", "w").write(str(total))
END
