"""Tools that the policy calls: a calculator, Python, files, search, and servers that speak MCP."""
