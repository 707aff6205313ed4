"""What a step costs where the wire is the limit: hosts on real, slow links.

Each module knows only those before it:

    network     hosts in network namespaces, links of a chosen rate, the interfaces' own counters
    oracle      payload of collectives, as torch dispatches them
    worker      one process on one host: steps of a method, what each took and sent
    cells       contestants; one run of one of them on a network, as a row
    __main__    the command
"""
