// Package repocheck holds the rules of this repository as tests: what a user's program links, where SQL may stand, what
// must not compile, and that the README shows code that compiles. `make verify` runs them. It exports nothing.
package repocheck
