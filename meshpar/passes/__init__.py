"""Functions from plan to plan: collective algorithms, overlap with products, order of products."""
