"""SGLang's radix cache: settings, tree, eviction."""
