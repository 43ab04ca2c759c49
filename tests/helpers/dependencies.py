"""What must wait for what in a program: the order that a compiler has to keep, read off a jaxpr."""

from jax.extend.core import Literal

from meshpar._src.compat.jax import jaxprs_in


def bodies(jaxpr):
    """A jaxpr and all in it."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        for body in jaxprs_in(eqn):
            yield from bodies(body)


def needs(jaxpr, eqn):
    """The equations of a jaxpr without which an equation cannot run, those in bodies aside."""
    maker = {v: e for e in jaxpr.eqns for v in e.outvars}
    found, todo = {}, [eqn]
    while todo:
        for v in todo.pop().invars:
            made = None if isinstance(v, Literal) else maker.get(v)
            if made is not None and id(made) not in found:
                found[id(made)] = made
                todo.append(made)
    return list(found.values())


def waits(jaxpr, later, earlier):
    """Of the equations of kind ``later``, each with how many of kind ``earlier`` it needs, body by body, in order."""
    return [
        sum(e.primitive.name == earlier for e in needs(body, eqn))
        for body in bodies(jaxpr)
        for eqn in body.eqns
        if eqn.primitive.name == later
    ]
