"""The server that the tests of this folder start and end, on a loopback port that the kernel chose."""

import socket
import subprocess

# It ends a wait that has no end: for a reply, for a job, for the end of the server.
PATIENCE_S = 60
socket.setdefaulttimeout(PATIENCE_S)


class Server:
    """A server on a socket that it inherits."""

    def __init__(self, program, *flags):
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        script = 'exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" "$@"'
        self.process = subprocess.Popen(["sh", "-c", script, program, *flags], stdin=listener)
        listener.close()

    def stop(self):
        self.process.terminate()
        return self.process.wait(PATIENCE_S)
