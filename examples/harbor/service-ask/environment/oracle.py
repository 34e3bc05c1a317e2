import random
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(sum(random.Random(int(self.path[1:])).sample(range(1000), 20))).encode())


HTTPServer(("127.0.0.1", 8200), Handler).serve_forever()
