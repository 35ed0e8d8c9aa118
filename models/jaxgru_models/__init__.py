"""The trained models of jaxgru that are larger than 3 MB. Only data: `jaxgru.lm.load` finds it."""
