"""What one hostile peer costs an innocent client of the same server.

attacks    the bytes that each attack sends
attacker   a process that carries one attack out
innocent   a process that asks all the time and records every latency
measure    server, innocent and attackers of one row, with the server's memory
report     the table, and whether each row meets the goals
"""
