import socket
import sys
import time


def ask(text):
    with socket.create_connection(("127.0.0.1", 8300), timeout=5) as connection:
        connection.sendall(text)
        return connection.makefile("rb").read()


for _ in range(20):
    try:
        sys.exit(not (ask(b"abc\n") == b"ABC\n" and ask(b"Two words\n") == b"TWO WORDS\n"))
    except OSError:
        time.sleep(0.1)
sys.exit(1)
