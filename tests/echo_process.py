"""Answers each request at its sockets with the same bytes, and `log X` by writing X to its log."""

import sys
from multiprocessing.connection import Connection, wait

connections = [Connection(int(number)) for number in sys.argv[1:3]]
while True:
    for connection in wait(connections):
        assert isinstance(connection, Connection)
        try:
            request = connection.recv_bytes()
        except EOFError:
            sys.exit()
        if request.startswith(b"log "):
            print(request[4:].decode(), flush=True)
        connection.send_bytes(b" ".join([request, *(word.encode() for word in sys.argv[3:])]))
