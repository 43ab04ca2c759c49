"""The one place that knows versions of JAX: what they call things, and where they keep them."""
