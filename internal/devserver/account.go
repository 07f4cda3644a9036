package devserver

import (
	"fmt"
	"os"
	"os/user"
	"strconv"
	"syscall"
)

// account is the user a server runs as. The zero account is the caller's own.
type account struct {
	uid, gid uint32
	name     string
}

// unprivileged returns the first of the named accounts that exists, or nobody,
// when the caller is root; otherwise the caller's own account.
func unprivileged(names ...string) (account, error) {
	if os.Geteuid() != 0 {
		return account{}, nil
	}
	for _, name := range append(names, "nobody") {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, errUID := strconv.ParseUint(u.Uid, 10, 32)
		gid, errGID := strconv.ParseUint(u.Gid, 10, 32)
		if errUID == nil && errGID == nil && uid != 0 {
			return account{uid: uint32(uid), gid: uint32(gid), name: name}, nil
		}
	}
	return account{}, fmt.Errorf("devserver: running as root and none of the accounts %v, nobody exists; create one or run as another user", names)
}

// credential is nil for the caller's own account.
func (a account) credential() *syscall.Credential {
	if a.uid == 0 {
		return nil
	}
	return &syscall.Credential{Uid: a.uid, Gid: a.gid}
}

// own gives a file or folder to the account.
func (a account) own(name string) error {
	if a.uid == 0 {
		return nil
	}
	if err := os.Chown(name, int(a.uid), int(a.gid)); err != nil {
		return fmt.Errorf("devserver: give %s to %s: %w", name, a.name, err)
	}
	return nil
}

// writeFile writes a file that belongs to the account.
func (a account) writeFile(name, content string, mode os.FileMode) error {
	if err := os.WriteFile(name, []byte(content), mode); err != nil {
		return fmt.Errorf("devserver: %w", err)
	}
	return a.own(name)
}
