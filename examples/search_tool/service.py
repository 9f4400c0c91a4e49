"""A search service over a few facts: POST {"query": ..., "top": n} -> {"results": [{"title": ..., "text": ...}]}."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

YEARS = {"Arden": 1204, "Belmor": 1387, "Corvia": 1519, "Dunmere": 1642, "Elsin": 1733, "Farrow": 1858}
FACTS = [{"title": town, "text": f"The town of {town} was founded in {year}."} for town, year in YEARS.items()]


def questions(first=0, count=6):
    """Return prompts about invented towns, which a model can answer only with a search."""
    chosen = list(YEARS.items())[first : first + count]
    text = "In which year was the town of {} founded? Search, then answer with the year."
    return [
        {"messages": [{"role": "user", "content": text.format(town)}], "answer": str(year)} for town, year in chosen
    ]


class Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = set(asked["query"].lower().split())
        best = sorted(FACTS, key=lambda fact: -len(words & set(fact["text"].lower().strip(".").split())))
        body = json.dumps({"results": best[: asked["top"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 8321), Answers).serve_forever()
