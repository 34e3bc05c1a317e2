#!/bin/bash
cat > /app/upper.py <<"END"
import socketserver


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(self.rfile.readline().upper())


socketserver.TCPServer.allow_reuse_address = True
socketserver.TCPServer(("127.0.0.1", 8300), Handler).serve_forever()
END
