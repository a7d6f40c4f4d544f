"""What the tests of plug-ins share."""
