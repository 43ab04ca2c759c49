"""Every spec of a value, as tests of relayouts go through them."""


def specs_of(rank, axes):
    """Every way to put some of the axes on the dims, in every order."""
    found = [((),) * rank]
    for axis in axes:
        found += [
            tuple((*e[:at], axis, *e[at:]) if i == d else e for i, e in enumerate(spec))
            for spec in found
            for d in range(rank)
            for at in range(len(spec[d]) + 1)
        ]
    return found
