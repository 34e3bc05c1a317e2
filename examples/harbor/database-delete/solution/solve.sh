#!/bin/bash
python3 - <<"END"
import sqlite3

database = sqlite3.connect("/app/shop.db")
database.execute("DELETE FROM orders WHERE amount < 8")
database.commit()
END
