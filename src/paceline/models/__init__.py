"""Model families, one folder each; each reads as its paper."""
