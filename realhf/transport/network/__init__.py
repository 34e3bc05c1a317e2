"""Says where the sockets of a run listen and whom they let in.

The launcher makes the keys (``RunKeys``) when ``network.bind`` names an address, writes them into a file of mode 600
and gives its path to every process that it starts. Each process makes one ``Network`` of the options, that file and the
master's address, and hands it to all that listen or connect in it:

- A listener binds ``Network.host`` and is known to others by ``Network.advertised``. The master's are ``network.bind``
  and ``network.advertise``; a worker's is the address from which it reaches the master, so that nobody has to list
  addresses of hosts. Without ``network.bind`` both are the loopback.
- With keys, every ZeroMQ socket is a CURVE socket. All listeners of a run share one key pair, all that connect share
  another. A listener takes the second one only (``curve``), and whoever connects takes a listener with the first
  one only, so each end proves that it belongs to the run. HTTP servers of the run take the token that lies beside them.
- Without keys nothing listens, or connects, anywhere but on the loopback: there, sockets are as plain as ever.

A way to start workers elsewhere (a scheduler) brings the file with the keys to the worker and passes its path; nothing
else here depends on how a worker was started.
"""
