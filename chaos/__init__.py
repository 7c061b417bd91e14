"""(see below)"""
