package stack

import (
	"context"
	"fmt"

	"kvepp/test/harness/process"
)

// Spawn starts a program of the caller's like the stack's own. The caller ends it.
func (s *Stack) Spawn(name string, env []string, argv ...string) (*process.Process, error) {
	return s.spawn(name, env, argv...)
}

// Folder returns the folder of logs and configurations.
func (s *Stack) Folder() string { return s.dir }

// ModelFolder returns the folder of the workers' model.
func (s *Stack) ModelFolder() string { return s.cfg.Model }

// spawn starts a program whose output goes to a file in the stack's folder.
func (s *Stack) spawn(name string, env []string, argv ...string) (*process.Process, error) {
	p, err := process.Start(s.dir, name, env, argv...)
	if err != nil {
		return nil, fmt.Errorf("stack: %w", err)
	}
	return p, nil
}

// up waits until ready returns nil. It fails at once if one of the processes has ended.
func (s *Stack) up(ctx context.Context, what string, ready func() error, on ...*process.Process) error {
	if err := process.Up(ctx, what, ready, on...); err != nil {
		return fmt.Errorf("stack: %w", err)
	}
	return nil
}
