"""Cost of one hostile peer for an innocent client of the same server.

attack        declaration of an attack
attacks       the bytes of each attack
call_attacks  attacks by complete calls
call_client   client of such calls, with HTTP/2's flow control
scene         models, sources and certificate of the attacked server
wire          bytes of HTTP/2, gRPC, Flight and ZMTP
attacker      process that runs one attack
innocent      process that sends requests all the time and records every latency
measure       server, innocent client and attackers of one row, with the server's memory
report        the table, and the goals of each row
"""
