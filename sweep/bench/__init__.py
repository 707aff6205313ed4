"""What a step costs where the wire is the limit: hosts on real, slow links.

Each module knows only those before it:

    network     hosts in network namespaces, links of a chosen rate, the interfaces' own counters
"""
