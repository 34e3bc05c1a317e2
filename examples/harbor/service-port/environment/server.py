from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello\n")


HTTPServer(("127.0.0.1", Path("/app/port.txt").read_text()), Handler).serve_forever()
