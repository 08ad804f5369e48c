"""What tools read of a mesh: members, traffic and decisions."""
