"""What `jdp doctor` looks at: this machine, and the processes together; each finding with the line that mends it."""
