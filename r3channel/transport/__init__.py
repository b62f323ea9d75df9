"""Moving bytes between a relay and its trainers. One contract, several implementations; see `transport.base`."""
