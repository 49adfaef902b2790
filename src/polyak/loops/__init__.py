"""The loops that train an agent: compiled as one program, or stepping an environment on the host; and evaluation."""
