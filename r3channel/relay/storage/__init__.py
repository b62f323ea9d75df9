"""Where rows lie: memory, copies that survive a kill, and what a killed relay left."""
