"""Cost of one hostile peer for an innocent client of the same server.

attacks    the bytes of each attack
attacker   process that runs one attack
innocent   process that sends requests all the time and records every latency
measure    server, innocent client and attackers of one row, with the server's memory
report     the table, and the goals of each row
"""
