"""A chain of re-fed drafts of a small MTP head: several rows deep in one call."""
